#!/usr/bin/env bash
# Finds out whether a Python model's process lives, and loads the model again; Triton does not.
#
#   revive.sh look MODEL REPOSITORY       exit code 0: its process lives
#   revive.sh load MODEL REPOSITORY       exit code 0: unloaded and loaded
#
# MASW_HTTP_PORT: of the server (8000). The process is known by the path of its code. Only for models
# that answer each call once, as the draft: requests go on without it meanwhile.
set -uo pipefail

verb=${1:-} model=${2:-} code=${3:-}/${2:-}/1/model.py
control=http://127.0.0.1:${MASW_HTTP_PORT:-8000}/v2/repository/models/$model
ask=(curl --noproxy '*' --silent --show-error --fail --request POST --data '{}')

case $verb in
    look) # the names are listed before grep starts, so it does not find itself
        grep --quiet --no-messages --fixed-strings --null-data --line-regexp \
            -- "$code" /proc/[0-9]*/cmdline
        ;;
    load)
        "${ask[@]}" --max-time 60 "$control/unload" && "${ask[@]}" --max-time 600 "$control/load"
        ;;
    *)
        echo "usage: revive.sh look | load MODEL REPOSITORY" >&2
        exit 2
        ;;
esac
