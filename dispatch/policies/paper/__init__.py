"""The policy of TridentServe (arXiv 2510.02838) as the paper has it, and how the default differs, one by one."""
