"""The benchmarks: `engine` puts ways of decoding side by side (`comparison`), `offline` times one of them under vLLM's
result keys, with its steps (`step_times`) as shares of what the machine can do (`roofline`)."""
