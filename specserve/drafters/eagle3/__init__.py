"""EAGLE-3, and the network that P-EAGLE shares. `drafter` serves it, `rollout` trains it, `start` begins it."""
