"""Independent tasks, run in this process, in worker processes, or on a Dask cluster."""
