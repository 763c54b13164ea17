"""Gemma 4's assistants, small models that read the cache of their target. `drafter` serves them; they are not trained
here."""
