"""The relay: how two nodes that both dial out only reach each other, sealed end to end.

sealed.py      pure: the handshake of the two ends, and the cipher of what follows
servicer.py    the relay itself, at the placement service: pairs two streams and copies bytes that it cannot read
channel.py     one end's connection: over the relay, through the handshake, as messages
dialling.py    the end that wants something: KV streams (a mesh.node.transport.Transport) and a NodePort
attendant.py   the end that was asked for: serves what the other one wants, by the same checks as the node listener
"""
