"""Tuning: the first steps are timed on every rank, compared with the plan, and become a corrected cost profile.

``clock`` times the calls of a generated module and takes itself out again, ``plan`` is what was predicted of it,
``reconcile`` makes one account of the ranks' records, ``align`` puts their clocks together, ``compare`` sets
measured beside predicted, ``correct`` makes the profile, ``exchange`` lets the ranks take one and the same result.
With a second plan (``replanning``), ``again`` hands on what the compiler kept, ``swap`` lets all ranks change at one
call or none, ``turnstile`` counts the calls and changes the code. ``gathered`` holds what came of all graphs and
``files`` writes it for the next run; ``settings`` finds ranks that were told something else.
"""
