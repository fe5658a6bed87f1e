"""The uplink: one session that an edge agent dials to the placement service, and all that flows over it.

hub.py, session.py, port.py    placement side: sessions by node id; each node behind a NodePort
agent.py, orders.py            edge side: connect, keep the lease, run orders, reconnect
lease.py, backoff.py,          pure parts: no I/O, time comes in as a number
worktable.py, outbox.py
wire.py                        the only place that knows how values look as protobuf
"""
