"""Model folders and training states on disk: safetensors and GGUF to parameters and back, downloads, quantised weights.

`source` finds the folder of a name, and `configs` its config. `load` makes parameters of it, by way of `tensors` (the
files) and `quantized`. `gguf` shows a file of llama.cpp's as such a folder. `lora` reads adapters of PEFT, and `update`
makes another version of what is served. `train_state` saves a run and restores it.
"""
