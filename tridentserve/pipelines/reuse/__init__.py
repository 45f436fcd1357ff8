"""Results of a denoising step that later ones use again: of whole blocks, or of patches of images."""
