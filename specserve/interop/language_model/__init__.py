"""Language models as drafts: their folders in `files`, their tokens in terms of the target's in `vocabulary`."""
