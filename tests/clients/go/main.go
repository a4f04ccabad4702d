// Streams, cancels, sets a deadline, reads what an error says, and watches health: client ADDRESS
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"example.org/chairlift/v1"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// generate hands each event to onEvent until the stream ends, with io.EOF if it ends well.
func generate(ctx context.Context, client chairliftv1.GenerationServiceClient, request *chairliftv1.GenerationRequest, onEvent func(*chairliftv1.GenerateResponse)) error {
	stream, err := client.Generate(ctx, &chairliftv1.GenerateRequest{Request: request})
	for err == nil {
		var event *chairliftv1.GenerateResponse
		if event, err = stream.Recv(); err == nil {
			onEvent(event)
		}
	}
	return err
}

func main() {
	connection, err := grpc.Dial(os.Args[1], grpc.WithInsecure()) // newer releases of grpc-go: credentials/insecure
	if err != nil {
		log.Fatal(err)
	}
	client, background := chairliftv1.NewGenerationServiceClient(connection), context.Background()
	request := &chairliftv1.GenerationRequest{
		Input: &chairliftv1.GenerationRequest_Text{Text: "the quick brown fox"}, MaxNewTokens: proto.Uint32(12),
		Sampling: &chairliftv1.SamplingParams{Temperature: proto.Float32(0)}, Stop: &chairliftv1.StopParams{IgnoreEos: true},
	}
	err = generate(background, client, request, func(event *chairliftv1.GenerateResponse) {
		fmt.Println(protojson.MarshalOptions{UseProtoNames: true}.Format(event))
	})
	if err != io.EOF {
		log.Fatal(err)
	}

	request.MaxNewTokens = proto.Uint32(8000)
	ctx, cancel := context.WithCancel(background) // leaving a call cancels its request
	err = generate(ctx, client, request, func(*chairliftv1.GenerateResponse) { cancel() })
	fmt.Printf("{\"cancelled\": {\"code\": %d}}\n", status.Code(err))

	ctx, cancel = context.WithTimeout(background, 200*time.Millisecond) // the deadline reaches the scheduler
	defer cancel()
	err = generate(ctx, client, request, func(*chairliftv1.GenerateResponse) {})
	fmt.Printf("{\"deadline\": {\"code\": %d}}\n", status.Code(err))

	request.Sampling.TopP = proto.Float32(2)
	err = generate(background, client, request, func(*chairliftv1.GenerateResponse) {})
	for _, detail := range status.Convert(err).Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			fmt.Printf("{\"refused\": {\"code\": %d, \"reason\": %q}}\n", status.Code(err), detail.Reason)
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				fmt.Printf("{\"violation\": {\"field\": %q, \"description\": %q}}\n", violation.Field, violation.Description)
			}
		}
	}

	watch, err := grpc_health_v1.NewHealthClient(connection).Watch(background, &grpc_health_v1.HealthCheckRequest{})
	for err == nil { // the watch tells every change; here it is left when the service stops serving
		var health *grpc_health_v1.HealthCheckResponse
		if health, err = watch.Recv(); err == nil {
			fmt.Printf("{\"health\": \"%s\"}\n", health.Status)
			if health.Status != grpc_health_v1.HealthCheckResponse_SERVING {
				return
			}
		}
	}
	log.Fatal(err)
}
