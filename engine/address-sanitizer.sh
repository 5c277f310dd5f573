#!/bin/sh
# rustc wrapper for `make sanitize`: cargo calls it for the workspace's crates only, so dependencies are not
# instrumented. The option is unstable, hence RUSTC_BOOTSTRAP, set only here so that cargo rebuilds nothing else.
RUSTC_BOOTSTRAP=1 exec "$@" -Zsanitizer=address
