"""Several processes or replicas as one server.

`ranks` and `messages`: one server whose mesh spans processes. `replicas`, `routing` and `fleet` (over `group`, `heads`
and `relay`): engines behind one address on Ray Serve. `kv_events`: reports of the prefix cache to other routers.
"""
