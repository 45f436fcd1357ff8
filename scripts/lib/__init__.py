"""What the scripts are made of: one folder per group of scripts, and what all of them share."""
