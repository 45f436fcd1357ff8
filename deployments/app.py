"""The application: `import_path: deployments.app:build_app` in a Serve config file, with `args` as in `AppArgs`."""

# Without `from __future__ import annotations`: Ray Serve reads the class of `args` from the annotation itself.

from ray import serve
from ray.serve import Application

from deployments.config import AppArgs
from deployments.ingress import Api
from deployments.scheduler import scheduler_deployment

# Every request that waits holds one place in a replica; the bound that counts is the scheduler's.
_MAX_ONGOING_REQUESTS = 10_000


def build_app(args: AppArgs) -> Application:
    """Two deployments: `Api`, any number of replicas, and `Scheduler`, exactly one, which owns the workers."""
    api = serve.deployment(name="Api", max_ongoing_requests=_MAX_ONGOING_REQUESTS, ray_actor_options={"num_cpus": 0.1})(
        Api
    )
    return api.bind(scheduler_deployment(args).bind(args), args.models)
