"""Pipelines of diffusers that no family here describes, which are served whole."""
