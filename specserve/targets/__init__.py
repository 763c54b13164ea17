"""Package data, no code: the bundled target and its heads, presets of targets, recipes, and figures of devices."""
