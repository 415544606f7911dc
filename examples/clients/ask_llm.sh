#!/bin/sh
# Gets JSON by a schema with Simon Willison's llm: pip install llm; ./ask_llm.sh [URL MODEL]
# The models file is temporary here; yours is extra-openai-models.yaml in the directory of `llm logs path`.
set -eu
LLM_USER_PATH=$(mktemp -d)
trap 'rm -rf "$LLM_USER_PATH"' EXIT
export LLM_USER_PATH OPENAI_API_KEY=unused
cat > "$LLM_USER_PATH/extra-openai-models.yaml" <<MODELS
- model_id: mesh
  model_name: ${2:-exo-mesh-demo}
  api_base: ${1:-http://127.0.0.1:52415}/v1
  supports_schema: true
MODELS
llm prompt --no-log -m mesh -o temperature 0 --schema 'name, age int' 'Make JSON: Anna is 7.'
