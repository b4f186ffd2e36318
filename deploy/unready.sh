#!/usr/bin/env bash
# Names what a start is waiting for, from the server's log.
#
#   unready.sh LOG RANKS      RANKS: processes of the target, one per GPU
#
# A model that rank 0 began to load and has not finished is named, and so is a rank that has not allocated
# its KV cache, the last step of loading an engine. The log's lines start with [1,RANK]<...>: where
# there are several ranks (mpirun's tags), and with nothing in front otherwise. A rank's last line
# is printed with it.
set -euo pipefail

awk -v ranks="$2" '
    {
        rank = match($0, /^\[1,[0-9]+\]/) ? substr($0, 4, RLENGTH - 4) : 0
        if ($0 !~ /^\[1,[0-9]+\]<[a-z]+>: *$/) last[rank] = $0
    }
    /max tokens in paged KV cache/ { allocated[rank] = 1 }
    rank == 0 && /"loading: [^"]+"/ {
        name = $0; sub(/.*"loading: /, "", name); sub(/:[0-9]+".*/, "", name); loading[name] = 1
    }
    rank == 0 && /"successfully loaded / {
        name = $0; sub(/.*"successfully loaded .?/, "", name); sub(/[^A-Za-z0-9_.-].*/, "", name)
        delete loading[name]
    }
    END {
        for (name in loading) print "model " name " began to load and has not finished"
        for (rank = 0; rank < ranks; rank++) if (!(rank in allocated)) {
            print "rank " rank " of the target has not allocated its KV cache; its last line: " \
                (rank in last ? last[rank] : "none")
        }
    }' "$1"
