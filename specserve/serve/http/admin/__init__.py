"""For operators: the server's state and the change of its draft head (`routes`), of its weights (`weights`) and its
LoRA adapters (`loras`), Prometheus series (`metrics`), and the description of the API (`openapi`, with a page of
it)."""
