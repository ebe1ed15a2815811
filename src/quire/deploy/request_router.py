"""Sends a call of Serve to the replica that it names.

quire.router.Router chooses the replica before the call, in the ingress (quire.ipc.replicas), and not here, because
Serve's API does not carry what it needs. The Router counts each output token and knows each cached page of each
replica; `RunningReplica.routing_stats` passes through the controller, by default every 10 seconds, and a router cannot
see the outputs of a call. Nor can it refuse one: a call that no candidate fits waits. So a call whose replica is no
longer among the candidates goes to any of them, which refuses it, and the ingress chooses again."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class NamedReplicaRouter(RequestRouter):
    """Chooses the replica with the id that is the first argument of the call."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replica of the call, or all if it isn't there."""
        name = pending_request.args[0] if pending_request is not None and pending_request.args else None
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == name]
        return [named or candidate_replicas]
