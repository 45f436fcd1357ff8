"""The Ray Serve application: its HTTP and Python front ends, its configuration, and the deployments behind them.

The modules are imported by name (`deployments.app:build_app`, `deployments.config.app`): only some of them need Ray.
"""
