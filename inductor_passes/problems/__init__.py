"""From graphs and fused kernels to scheduling problems: tasks, lanes, storages, and what ranks have in common."""
