"""What is known of models without torch: families, model folders, LoRA files, input images and their sizes."""
