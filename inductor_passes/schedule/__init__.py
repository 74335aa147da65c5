"""The IR-free planner: what may run when, how long it takes, and which order is best under a memory cap.

Nothing here imports torch. Both front ends (the FX graph and Inductor's fused scheduler nodes) build a
:class:`~inductor_passes.schedule.problem.Problem`, and every answer is an order of its tasks.
"""
