"""posters: the actors that make the POSTs, and all that keeps them.

`poster` is the actor. On the pool's side `lane` is one life of one, with what is in flight there
(`batching`, `wire`); `keeper` starts, watches and replaces it; `roster` has the keepers, and follows the
cluster (`scout`, `placement`). `local` makes the POSTs itself while no poster is healthy.
"""
