"""Block drafters: DFlash, and DSpark and DFlash2, whose slots depend on each other (`joint`)."""
