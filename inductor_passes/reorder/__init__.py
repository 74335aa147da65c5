"""Scheduling on FX: graph -> :class:`~inductor_passes.schedule.problem.Problem` -> plan -> graph."""
