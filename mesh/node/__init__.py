"""What a node is, whatever its engine: the Engine interface, and the host that runs legs and KV transfers on one."""
