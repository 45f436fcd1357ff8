"""Facts about models that need no torch: families, model folders, LoRA files, input images and their sizes."""
