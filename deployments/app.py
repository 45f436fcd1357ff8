"""The application: `import_path: deployments.app:build_app` in a Serve config file, with `args` as in `AppArgs`."""

# Without `from __future__ import annotations`: Ray Serve reads the class of `args` from the annotation itself.

from ray import serve
from ray.serve import Application

from deployments.config.app import AppArgs
from deployments.serve.api_deployment import Api
from deployments.serve.scheduler_deployment import scheduler_deployment
from deployments.serve.videos_deployment import keeps_videos, videos_deployment

# Every request that waits holds one place in a replica; the bound that counts is the scheduler's.
_MAX_ONGOING_REQUESTS = 10_000


def build_app(args: AppArgs) -> Application:
    """`Api`, any number of replicas, and `Scheduler`, exactly one, which owns the workers; `Videos`, which keeps the
    jobs, where videos are served."""
    api = serve.deployment(name="Api", max_ongoing_requests=_MAX_ONGOING_REQUESTS, ray_actor_options={"num_cpus": 0.1})(
        Api
    )
    scheduler = scheduler_deployment(args).bind(args)
    videos = videos_deployment().bind(scheduler, args) if keeps_videos(args) else None
    return api.bind(scheduler, args, videos)
