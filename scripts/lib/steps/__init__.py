"""Measurements of denoising steps: of those that leave out work, and of those that requests share."""
