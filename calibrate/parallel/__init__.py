"""Where independent tasks run: this process, several, or a Dask cluster."""
