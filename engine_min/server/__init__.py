"""An OpenAI-compatible HTTP server: the engine steps in a thread of its own, Starlette and uvicorn speak to clients."""
