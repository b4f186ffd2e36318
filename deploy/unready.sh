#!/usr/bin/env bash
# Names what a start is waiting for, from the server's log.
#
#   unready.sh LOG RANKS      RANKS: processes of the target, one per GPU
#
# A model that rank 0 began to load and has not finished is named, and so is a rank that has not allocated
# its KV cache, the last step of loading an engine, with the last line it wrote. Lines start with
# mpirun's tag [JOB,RANK]<...>: or with nothing, which is rank 0. Job 1 is what mpirun starts; where a
# server spawns the ranks itself (orchestrator), these are job 2.
set -euo pipefail

awk -v ranks="$2" '
    {
        tagged = match($0, /^\[[12],[0-9]+\]/)
        job = tagged ? substr($0, 2, 1) : 1
        rank = tagged ? substr($0, 4, RLENGTH - 4) : 0
        if (job == 2 && !spawned++) split("", last)
        if ((job == 2 || !spawned) && $0 !~ /^\[[12],[0-9]+\]<[a-z]+>: *$/) last[rank] = $0
    }
    /max tokens in paged KV cache/ { allocated[rank] = 1 }
    job == 1 && rank == 0 && /"loading: [^"]+"/ {
        name = $0; sub(/.*"loading: /, "", name); sub(/:[0-9]+".*/, "", name); loading[name] = 1
    }
    job == 1 && rank == 0 && /"successfully loaded / {
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
