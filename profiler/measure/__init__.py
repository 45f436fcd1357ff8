"""The offline profiler, which runs real pipelines. Imported by its name only."""
