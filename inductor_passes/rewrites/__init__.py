"""Graph rewrites of collectives: one file per rewrite with what it matches, why it is correct and what it saves; one
driver (``pass_``) that applies them to a fixpoint.
"""
