"""From Inductor's hooks to a finished report: the pipeline that runs passes, the cache key, the joint graph and the
partitioner, the scheduler hook. Only this package takes snapshots, restores graphs and publishes reports.
"""
