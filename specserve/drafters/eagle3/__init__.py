"""EAGLE-3, and the network that P-EAGLE shares: `config`, `model`, `drafter` (serving), `rollout` (training), `start`."""
