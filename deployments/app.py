"""The application: `import_path: deployments.app:build_app` in a Serve config file, with `args` as in `AppArgs`."""

# Without `from __future__ import annotations`: Ray Serve reads the class of `args` from the annotation itself.

from ray import serve
from ray.serve import Application

from deployments.config.app import AppArgs
from deployments.serve.api_deployment import ApiDeployment
from deployments.serve.scheduler_deployment import MAX_ONGOING_REQUESTS, make_scheduler_deployment
from deployments.serve.videos_deployment import make_videos_deployment, needs_videos


def build_app(args: AppArgs) -> Application:
    """The deployments of one service: `Api` with any number of replicas; `Scheduler` with exactly one, which owns the
    workers, and further ones like it where there are several cells; and where videos are served `Videos`, which keeps
    the jobs."""
    api = serve.deployment(name="Api", max_ongoing_requests=MAX_ONGOING_REQUESTS, ray_actor_options={"num_cpus": 0.1})(
        ApiDeployment
    )
    first = make_scheduler_deployment(args).bind(args)
    others = [make_scheduler_deployment(args, cell).bind(args, cell, first) for cell in range(1, args.scheduler.cells)]
    schedulers = [first, *others]
    videos = make_videos_deployment().bind(schedulers, args) if needs_videos(args) else None
    return api.bind(schedulers, args, videos)
