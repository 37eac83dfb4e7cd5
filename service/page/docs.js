// The page at /docs: Swagger UI, on the description of this server's routes.

SwaggerUIBundle({ url: "openapi.json", dom_id: "#routes", deepLinking: true, validatorUrl: null });
