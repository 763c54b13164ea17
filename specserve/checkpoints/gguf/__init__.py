"""Single-file models in GGUF, the format of llama.cpp (github.com/ggml-org/ggml/blob/master/docs/gguf.md).

A file is shown as a Hugging Face folder (`folder`), so that all else reads it as it reads any target: its config
(`config`), its tokenizer (`tokenizer`), and its weights under their Hugging Face names (`weights`). `container` has the
file's own layout. `interop.gguf` reads draft heads by these.
"""
