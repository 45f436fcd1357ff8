"""The start of the processes of workers."""
