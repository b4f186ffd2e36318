#!/usr/bin/env bash
# Serves a recipe of the gpu lane: preflight, start, watchdog, revival, drain.
#
#   launch.sh RECIPE ROOT     RECIPE: a name or a YAML file; ROOT: the folder of models and engines
#
# Environment, in seconds: MASW_READY_SECONDS (1800) until the first token, MASW_DRAIN_SECONDS (120)
# for running requests after SIGTERM or SIGINT, MASW_STOP_SECONDS (30) for the server to end by
# itself, MASW_WATCH_SECONDS (15) between two looks, MASW_HANG_SECONDS (180) without a token until it
# counts as hung; MASW_LOG (/tmp/masw-launch.log): a copy of all output.
# A dead draft is loaded again; a server that gives no token any more is ended, for whoever runs
# this to start it anew. A second signal ends it at once.
# Exit code: 0 after a drain, 1 when requests were cut off; 2 for a wrong recipe or number; the
# preflight's when it fails; 70 when it was not ready in time, 71 when it hung; the server's own when
# it ends by itself, 1 if that was 0.
set -uo pipefail

(($# == 2)) || { echo "usage: launch.sh RECIPE ROOT" >&2; exit 2; }
trap 'exit 143' TERM INT
recipe=$1 root=$2
here=$(dirname "$(readlink -f "$0")")
ready_seconds=${MASW_READY_SECONDS:-1800}
drain_seconds=${MASW_DRAIN_SECONDS:-120}
stop_seconds=${MASW_STOP_SECONDS:-30}
watch_seconds=${MASW_WATCH_SECONDS:-15}
hang_seconds=${MASW_HANG_SECONDS:-180}
log=${MASW_LOG:-/tmp/masw-launch.log}
server= signals=0 draft_seen=0

say() { echo "masw-launch: $*" >&2; }

# What is needed of the recipe: RANKS HTTP_PORT METRICS_PORT REPOSITORY.
read_recipe() {
    python3 - "$recipe" "$root" <<'PYTHON'
import sys
from pathlib import Path
from masw.engines.places import Places
from masw.engines.recipe import RecipeError, load_recipe

try:
    recipe = load_recipe(sys.argv[1])
except RecipeError as error:
    sys.exit(f"masw-launch: {error}")
if recipe.lane != "gpu":
    sys.exit(f"masw-launch: recipe {recipe.name} is of lane {recipe.lane}; use masw-serve")
serving, repository = recipe.serving, Places(Path(sys.argv[2])).repository.absolute()
print(recipe.target.ranks, serving.http_port, serving.metrics_port, repository)
PYTHON
}

# In a session of its own, so that the terminal's Ctrl-C reaches this script alone.
start() {
    export OMPI_MCA_orte_tag_output=1 # [1,RANK]<stderr>: in front of each line
    : >"$log"
    say "starting: $1"
    setsid bash -c "$1" </dev/null > >(exec tee -i -a "$log") 2>&1 &
    server=$!
}

running() { kill -0 "$server" 2>/dev/null; }

# Sleeps so that a signal is handled at once.
pause() { sleep "$1" >/dev/null 2>&1 & wait $! || true; }

end_server() {
    kill -TERM -- "-$server" 2>/dev/null
    local deadline=$((SECONDS + stop_seconds))
    while running && ((SECONDS < deadline && signals < 2)); do pause 0.2; done
    kill -KILL -- "-$server" 2>/dev/null
    wait "$server" 2>/dev/null
}

on_signal() {
    signals=$((signals + 1))
    if ((signals == 1)); then say "draining, at most $drain_seconds s"; fi
}

drain() {
    local code=0 drainer
    setsid "$here/drain.sh" "$drain_seconds" &
    drainer=$!
    while kill -0 "$drainer" 2>/dev/null && running && ((signals < 2)); do pause 0.2; done
    if kill -0 "$drainer" 2>/dev/null; then
        # It may have had no time yet to begin a session of its own.
        kill -TERM -- "-$drainer" 2>/dev/null || kill -TERM "$drainer"
        code=1
    else
        wait "$drainer" || code=1
    fi
    end_server
    if ((code)); then say "stopped; requests were cut off"; else say "stopped"; fi
    exit "$code"
}

ended() {
    wait "$server"
    local code=$?
    say "the server ended with code $code; its log: $log"
    exit $((code ? code : 1))
}

give_up() {
    say "not ready after $ready_seconds s: ${reason#ready: }"
    "$here/unready.sh" "$log" "$ranks" | while read -r line; do say "$line"; done
    end_server
    exit 70
}

wait_until_ready() {
    local deadline=$((SECONDS + ready_seconds))
    until reason=$("$here/ready.sh" 2>&1); do
        ((signals == 0)) || drain
        running || ended
        ((SECONDS < deadline)) || give_up
        pause 1
    done
}

# Only a process that was seen before can have died.
revive_draft() {
    if "$here/revive.sh" look masw_draft "$repository"; then
        draft_seen=1
    elif ((draft_seen && signals == 0)); then
        say "the process of masw_draft has died; loading it again"
        if reason=$("$here/revive.sh" load masw_draft "$repository" 2>&1); then
            say "masw_draft is back"
        else
            say "masw_draft could not be loaded: $reason"
        fi
    fi
}

watch() {
    local seen=$SECONDS waited code
    while true; do
        for ((waited = 0; waited < watch_seconds && signals == 0; waited++)); do pause 1; done
        ((signals == 0)) || drain
        running || ended
        revive_draft
        reason=$("$here/ready.sh" 2>&1)
        code=$?
        if ((code == 0 || code == 3)); then
            seen=$SECONDS # 3: the loop model is unloaded, somebody drains
        elif ((signals == 0 && SECONDS - seen >= hang_seconds)); then
            say "not ready for $((SECONDS - seen)) s: ${reason#ready: }"
            end_server
            exit 71
        fi
    done
}

for name in ready_seconds drain_seconds stop_seconds watch_seconds hang_seconds; do
    [[ ${!name} =~ ^[0-9]+$ ]] || { say "$name is '${!name}'; give a whole number"; exit 2; }
done
facts=$(read_recipe) || exit 2
read -r ranks MASW_HTTP_PORT MASW_METRICS_PORT repository <<<"$facts"
export MASW_HTTP_PORT MASW_METRICS_PORT

masw-build check "$recipe" --root "$root" || { code=$?; say "the preflight failed"; exit "$code"; }
line=$(masw-build launch "$recipe" --root "$root") || exit $?
trap on_signal TERM INT
start "$line"
wait_until_ready
revive_draft
say "ready on HTTP port $MASW_HTTP_PORT after $SECONDS s"
watch
