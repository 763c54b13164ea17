"""For operators: the server's state and the change of its draft head (`routes`), Prometheus series (`metrics`), and the
description of the API (`openapi`, with a page of it)."""
