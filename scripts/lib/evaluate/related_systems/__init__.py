"""The settings of the papers of related systems, and their figures beside ours."""
