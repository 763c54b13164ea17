"""Pure forwards of target models. There is one, `target.forward`; a family of models is a row of flags.

Read `config` (the flags), `params` (parameters as trees of specs) and `target`, then the layers that it is made of:
`mixers` (attention and states that recur), `layers` (the dense MLP) and `moe`. `families` reads Hugging Face's
config.json files, `cache` holds what committed tokens leave behind, `adapters` is LoRA, and `sharding` decides what is
cut over a mesh.
"""
