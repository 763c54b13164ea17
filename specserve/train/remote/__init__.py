"""Training over many processes on a Ray cluster: a run's workers, a target in processes of its own (`target_service`
asks `target_actor`, which runs `prefill`), and hidden states that many workers capture. `specserve.launcher` starts
them."""
