"""Cells: parts of a cluster that have a scheduler each, and the choice of a cell for each request."""
