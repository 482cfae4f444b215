"""The engine on the workers of a Ray cluster.

- `engine.py`: the engine, which cuts a round's jobs into chunks and joins their results
- `pool.py`: workers of a cluster, which train chunks
- `worker.py`: one worker, in its own process
- `parcel.py`: values that are sent between processes
- `connection.py`: the connection to a cluster
"""
