#!/bin/sh
# rustc for `make sanitize`: cargo calls it for the workspace's own crates, which are instrumented; what they depend on is
# not. The switch is not stable, hence the variable, which is set here alone so that cargo builds nothing else anew.
RUSTC_BOOTSTRAP=1 exec "$@" -Zsanitizer=address
