"""Layers of multi-token prediction, which targets carry in their own checkpoints (`carried`) or that are trained."""
