"""Checks of a whole deployment file before Ray sees it."""
